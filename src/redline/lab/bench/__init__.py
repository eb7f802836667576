"""`redline bench`: one case or all."""
