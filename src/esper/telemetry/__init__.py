"""What happened, as small frozen records that serialise themselves.

No torch in here, and no global sink.
"""
