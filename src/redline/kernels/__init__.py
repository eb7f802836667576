"""All that imports triton, or ctypes for a device, and the C of CPUs (`cpu/`). `available.py` says whether triton serves; the
records that callers and kernels share (`segments.py`, `flat_state.py`) lie here too, since nothing here imports anything
above."""
