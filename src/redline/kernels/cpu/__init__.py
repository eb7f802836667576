"""C for what lies between a decoder's products on a CPU, compiled where it runs (`compiled.py`)."""
