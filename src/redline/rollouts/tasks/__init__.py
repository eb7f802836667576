"""Where tasks come from, and what is checked about them."""
