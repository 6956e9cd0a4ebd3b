"""Messages among several processes at once: streams of pieces between each two of them, through slots that each end keeps for
the other, and the sums of what arrives. The compiled loop for peers whose memory is mapped here, and the one that posts for
others."""
