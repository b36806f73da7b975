"""What survives a power cut: durable files, the store of saves, and every name in a run folder.

Bytes and plain data come in. Tensors, events and settings stay outside: those who save them turn
them into bytes first. The room imports no torch.
"""
