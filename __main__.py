"""`python -m cacheformers`: what the command `cacheformers` does."""

from cacheformers.cli.main import main

if __name__ == "__main__":
    main()
