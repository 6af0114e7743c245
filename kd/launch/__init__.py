"""How a job's machines and processes are recognised, how they meet, and with which process a child ends."""
