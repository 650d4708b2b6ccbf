"""What kernels and engine do per second, beside what the machine could do in the same minute."""
