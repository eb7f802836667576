"""`redline tune`: settings of a recipe that make it faster, found by measurement and proven."""
