"""unit/ has one file per subject; integration/ uses a real Redis; e2e/ runs whole processes; tour/
follows one post.
"""

import os

# Must be set before torch is imported. Otherwise its idle threads spin and slow down the other
# test processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
