"""The lab: measures what the stages do, beside what physics allows and what others reach. Nothing below it imports it."""
