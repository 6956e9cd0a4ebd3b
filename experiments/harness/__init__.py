"""What every experiment needs: processes, floors, measurements, pictures."""
