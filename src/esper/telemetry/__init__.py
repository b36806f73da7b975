"""What happened, as records: the kinds of events, how many of them are kept, and where they go.

Also the curves that trackers draw of them, and how sure a mean is. Events hold plain values: no
tensors, no modules, and nothing here decides what training does next.
"""
