"""`python -m packtrain.cli`."""

from packtrain.cli.commands import main

if __name__ == "__main__":
    main()
