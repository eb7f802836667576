"""What a run costs: its time in money, the part of it in which devices stood still, and what a target reward will take."""
