"""When this process began: to be imported before what takes long to import."""

import time

START = time.monotonic()
