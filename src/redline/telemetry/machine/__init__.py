"""What host and devices were doing."""
