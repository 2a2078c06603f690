"""The transfer of states: how peers give theirs, and how those that join or have fallen behind download one."""
