"""Every word that processes or devices share, and the compiled loops over them. Each shared word has one owner, who alone
writes it; the pairs of release and acquire are documented where the word is defined. Imports no other room."""
