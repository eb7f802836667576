"""Everything that imports triton, or ctypes for a device. `available.py` says whether it serves; the records that callers and
kernels share (`segments.py`, `flat_state.py`) lie here too, since nothing here imports anything above."""
