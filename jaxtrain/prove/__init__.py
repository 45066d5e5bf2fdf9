"""`verify`: check that no layout changes the result. Import submodules, so that devices can be configured first."""
