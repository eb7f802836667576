"""Rules of the doctor, by stage: each looks at the facts of a run for one cause of lost time."""
