"""The long campaign behind `make faults`: thousands of power cuts, kills, damages, absurd settings and failing disks."""
