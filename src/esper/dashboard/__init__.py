"""What happened, on screen.

Reads events and run folders only: neither torch nor the training code is imported here.
"""
