"""What happens beside the steps, the same in every loop. The training stage lists them in their order."""
