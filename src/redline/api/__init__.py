"""What `import redline` gives beside the records: training and sampling from Python, as the verbs do it."""
