"""What can be measured, one file each."""
