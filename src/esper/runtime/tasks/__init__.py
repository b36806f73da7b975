"""What hosts are trained on: tasks, their data and where it comes from."""
