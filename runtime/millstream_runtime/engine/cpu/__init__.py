"""What only a CPU needs: a second thread, the number of threads, memory that is freed and taken again."""
