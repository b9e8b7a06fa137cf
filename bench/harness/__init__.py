"""What every bench needs: start launchers, see their ranks' steps, kill, clean up, report."""
