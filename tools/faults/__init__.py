"""The campaign behind `make faults`: thousands of power cuts, kills, damages, absurd settings, failing disks."""
