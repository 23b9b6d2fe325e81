"""The screens: one file each, which computes what ``page/screens/`` draws. `locant.explore` says how to add one."""
