"""unit/ has a file a subject; integration/ has a real Redis; e2e/ runs whole processes; tour/ follows one post."""
