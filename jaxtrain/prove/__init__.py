"""Proof that the layout never changes the answer: `verify`. Import submodules: devices must be made first."""
