"""Power cuts, damage, hostile folders and failing disks: the pieces, and the sample of them that `make test` runs."""
