"""Settings of every test run."""

import os

# Two workers with two threads each would fight over two cores; one thread each is faster. Libraries
# read this when they are first imported, and child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
