"""Many runs, and runs on other machines: jobs, searches, scaling."""
