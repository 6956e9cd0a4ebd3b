"""The layouts of the words (mostly 64-bit integers) that processes or adapters share, and the compiled loops over them:
atomics, copies, notifications, completion queues. The pairs of release and acquire are documented where a word is defined.
Imports no other room."""
