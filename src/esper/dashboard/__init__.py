"""What happened, on screen: terminal, browser and report draw one view of a run.

The view is folded from events and the files of a run folder, so that a run can be looked at while
another process writes it. Neither torch nor the training code may be imported here, and nothing
here writes to a run folder.
"""
