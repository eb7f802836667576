"""Recipe → a run: what runs where, the stages that are built and connected for it, and the loop around them."""
