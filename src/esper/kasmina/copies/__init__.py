"""All that a copy of a layer inherits: whether it can, how it is made, and where it then stands.

`eligibility` tries, `copying` copies, `membership` puts a copy into its original's list, and
`originals` pairs parameters. Which copies are planted is decided elsewhere, and blueprints that
draw weights are not here. `copying` and `membership` need torch alone: exports carry them along.
"""
