"""Reading: from the numbers of samples to a batch, ahead of the training and, if asked for, in processes of their own.

    settings -> datasets (one function reads a batch) -> read_ahead (threads) -> reader_processes -> reader_main

Which samples are read, and which batch comes next, is decided by the caller. Reading changes nothing: what was read
ahead and is not needed is thrown away.
"""
