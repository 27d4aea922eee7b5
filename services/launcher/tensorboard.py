"""`python -m troupe.services.launcher.tensorboard`: TensorBoard beside a user's files.

Importing `troupe` puts Python's own modules first. TensorBoard by itself would import a `queue.py` from
PYTHONPATH.
"""

from tensorboard.main import run_main

if __name__ == "__main__":
    run_main()
