"""The modes: how gradients are carried, by allreduce or through parameter servers."""
