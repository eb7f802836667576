"""What `redline train --resume` reads of a run folder, and in which order.

config.json ──which_run──► the run's own recipe          base_model.json, task_data.json ──began_with──► refused if changed
checkpoints/ ──nothing_to_do──► finished already?        checkpoints/, trajectories/, logs ──state──► where it goes on
"""
