"""What the tests share: the process harness and the recorder of process groups."""
