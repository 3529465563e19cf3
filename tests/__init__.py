"""unit/ has a file a subject; integration/ has a real Redis; e2e/ runs whole processes; tour/ follows one post."""

import os

# Before torch is imported: its threads, while they wait for work, would take the cores of the other test processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
