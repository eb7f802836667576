"""What runs beside redline, in processes of its own: the zygote, the cells it makes, and the programs in them.

Nothing here imports more than the standard library, and nothing here ever holds what a test expects.
"""
