"""`python -m lex_pretrain` is the same program as `lex-pretrain`."""

from lex_pretrain.cli import main

if __name__ == "__main__":
    main()
