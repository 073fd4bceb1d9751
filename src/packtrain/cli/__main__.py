"""`python -m packtrain.cli`."""

from packtrain.cli.main import main

if __name__ == "__main__":
    main()
