"""What a recorded run would do with other settings: its loop in simulated time, with the distributions that it recorded."""
