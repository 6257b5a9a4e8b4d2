from django.urls import path

from instances import views

app_name = "instances"

urlpatterns = [
    path("", views.index, name="list"),
    path("<str:vllm_hi_id>/", views.detail, name="detail"),
]
