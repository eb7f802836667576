"""`redline plan`: what a recipe will take, in memory, time and money, before anything is loaded.

recipe ──► shapes.py    the model's shape, from a config file or a header
       ──► setup.py     everything that decides sizes, with nothing left open
       ──► memory.py    phases and their terms, on the device and on the host
       ──► timing.py    seconds of each phase, from rates (devices.py) and efficiencies (calibration.py)
       ──► advice.py    what to cut if it does not fit, and what each cut costs
       ──► plan.py      the whole, and table.py for a person
"""
