"""What a person sees in a terminal while a run goes on."""
