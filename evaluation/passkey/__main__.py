"""`cacheformers passkey`."""

from cacheformers.evaluation.passkey.main import main

if __name__ == "__main__":
    main()
